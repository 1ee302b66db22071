from .http_app import Pages as Pages
